"""The model card of a student, uploads of a student or of the page to the Hub, and the export to ONNX."""
