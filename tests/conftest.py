"""Settings shared by all tests."""

import os

# Before anything imports torch: rank processes inherit these, and two cores are shared by up to four ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
