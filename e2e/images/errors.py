"""The errors of building images, in words for the person at the terminal."""


class ImageError(Exception):
    """An image could not be built or written out; the message says what to do."""
