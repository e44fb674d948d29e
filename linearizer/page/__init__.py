"""The page: everything here, and nothing elsewhere, knows of Gradio."""
