"""The Gluon provider: SM90, warp-specialised, TMA and asynchronous tensor cores."""
