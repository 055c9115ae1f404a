"""One module for each way to write a job, with ``recognises`` and ``read``."""
