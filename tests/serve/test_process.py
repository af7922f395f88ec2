"""While it serves, the collector leaves alone what was there before; afterwards all is as it was."""

import gc
import sys

from needlework.serve.process import SWITCH, settled


def test_what_was_there_is_collected_no_more_while_it_serves():
    interval, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() > frozen and abs(sys.getswitchinterval() - SWITCH) < 1e-6
    assert bool(gc.get_freeze_count()) == bool(frozen) and sys.getswitchinterval() == interval
