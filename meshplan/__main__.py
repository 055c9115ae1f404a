"""``python -m meshplan`` is the command ``meshplan``."""

from __future__ import annotations

import sys

from meshplan.cli import main

sys.exit(main())
