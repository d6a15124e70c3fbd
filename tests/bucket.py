"""A file system at URLs `bucket://…`, as a server has it: a folder that outlives programs."""

import os

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

PLACE = "COEC_TEST_BUCKET"
"""The environment variable that names the folder."""


class Bucket(DirFileSystem):
    """What is in the folder, by paths relative to it; what it was given is on the disk."""

    protocol = "bucket"
    cachable = False

    def __init__(self, **options):
        super().__init__(path=os.environ[PLACE], fs=LocalFileSystem(auto_mkdir=True))

    def put_file(self, here, there, **options):
        """Copies a file, as a server does that answers when nothing can be lost any more."""
        super().put_file(here, there, **options)
        with open(self._join(there), "rb") as file:
            os.fsync(file.fileno())


fsspec.register_implementation("bucket", Bucket, clobber=True)
