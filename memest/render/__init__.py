"""Old name of the writers of `memest.report`; it goes in the next release."""

from __future__ import annotations

import sys
import warnings

from memest.report import page, text

warnings.warn(
    "`memest.render` is `memest.report` now: `memest.report.page`, `memest.report.text`",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules |= {"memest.render.html": page, "memest.render.text": text}
