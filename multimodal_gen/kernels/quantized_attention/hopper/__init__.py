"""The SM90 kernel, in Gluon."""
