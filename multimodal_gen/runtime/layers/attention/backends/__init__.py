"""One file per attention backend."""
