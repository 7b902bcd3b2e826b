"""`python -m kilat.cli`: the same as the `kilat` script."""

import sys

from kilat.cli.main import main

sys.exit(main())
