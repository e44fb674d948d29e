"""The page, as a Space runs it and as `python app.py` does; `linearizer app` is the same."""

from linearizer.page.site import serve

if __name__ == "__main__":
    serve()
