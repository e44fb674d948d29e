"""The version of this package; a Space has the package without its metadata, so it stands here."""

__version__ = "0.1.0"
