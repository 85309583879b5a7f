"""After this import, `import colossalai` and everything below it are answered by this package.

    python -m shardwright.compat.colossalai train.py ...                             # nothing in train.py changes
    torchrun --nproc-per-node 4 -m shardwright.compat.colossalai train.py ...

or, as the first line of a script, `import shardwright.compat.colossalai`. Names, arguments, their order and their
defaults are those of Colossal-AI 0.5. A name that has no counterpart raises an ImportError that says what to use
instead, an argument that has none a ValueError.

An installed Colossal-AI is not hidden without a word: with one, this import fails unless the environment has
SHARDWRIGHT_SHADOW_COLOSSALAI=1.
"""

from __future__ import annotations

from .finder import install

install()
