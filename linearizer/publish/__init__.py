"""The model card of a student, and what is sent to the Hub: the student, its run, or a Space with the page."""
