"""The version, read by the build, by what writes records and by the command line."""

__version__ = "0.2.0"
