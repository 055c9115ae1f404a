"""Ranks that do nothing for longer than any test takes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

if __name__ == "__main__":
    said = Path(os.environ["MESHPLAN_TEST_FOLDER"]) / f"ready.{os.environ['RANK']}.json"
    said.write_text(json.dumps(True))
    time.sleep(600)
