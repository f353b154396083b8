"""These tests have a process of their own: where DeepSpeed is installed, Lightning and others import other things."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]
