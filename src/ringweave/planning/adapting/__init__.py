"""Planning while a job runs: which candidate is fastest when measured, whether rates have drifted, what they are now.

Pure: observations in, rulings out. `comm/adapting` carries them between the ranks.
"""

from ringweave.planning.adapting.advising import MAX_AGE_S, Adviser
from ringweave.planning.adapting.reports import Report
from ringweave.planning.adapting.rulings import Ruling, Stream
from ringweave.planning.adapting.situations import Situation
from ringweave.planning.adapting.tuning import size_class

__all__ = ["MAX_AGE_S", "Adviser", "Report", "Ruling", "Situation", "Stream", "size_class"]
