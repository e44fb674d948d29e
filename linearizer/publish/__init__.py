"""The model card of a student, and uploads of a student or of the page to the Hub."""
