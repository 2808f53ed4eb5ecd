"""`python -m lab VERB ...`: see `lab.cli`.

Kept apart so that importing the command line starts nothing.
"""

import sys

from lab.cli import main

sys.exit(main(sys.argv[1:]))
