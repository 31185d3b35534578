"""Run the command line with `python -m multimodal_gen`."""

import sys

from multimodal_gen.cli.main import main

sys.exit(main())
