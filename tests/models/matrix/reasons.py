"""Why parameters stay whole on every tensor-parallel rank, by what they are called."""

from __future__ import annotations

import re

ENOUGH = 0.9  # share of the parameters, below which the page says what is left
UNKNOWN = "no way to deal it is known"
# The first that is found in the name counts.
_REASONS = (
    (
        r"patch_embed|embeddings\.projection\.",
        "makes patches of pixels in front of the layers: less than 1 % of a large checkpoint, and far more of a model "
        "this small",
    ),
    (
        r"conv\d?\.|pos_conv|feature_extractor|neck\.",
        "a convolution before or behind the layers, whose channels the next one or a norm reads all together: a few "
        "percent of a checkpoint at most",
    ),
    (
        r"rel_embeddings|relative_embeddings|pos(ition)?_emb|embed_positions|pos_embed",
        "a table of positions, which is added to whole activations: dealing it would gather it in every step, to save "
        "less than 1 % of a checkpoint",
    ),
    (
        r"vision_(tower|model)\.head",
        "pools what the tower returns, which this model does not read: nothing would be tried of it",
    ),
    (r"altup", "makes one copy of the residual from another one, all of whose features are mixed before they are read"),
    (r"per_layer", "meets features of every token and layer that each rank looks up whole, few whatever the width is"),
    (
        r"laurel|_a_proj|linear_left|linear_right",
        "a side of a two-step projection of low rank, which does not grow with the heads",
    ),
    (r"indexer", "chooses the tokens that all heads look at, from the scores of its own heads together"),
    (r"position_bias_mlp", "the linear behind two coordinates, which the numbers of all heads are made of"),
    (r"router|gate\.", "all ranks choose the same experts"),
    (r"mm_input_projection", "a parameter that the forward multiplies with by itself"),
    (
        r"multi_modal_projector|mapping_in|transform\.dense|predictions\.dense|lm_head|classifier|score",
        "a linear outside of the layers, with none beside it that could take its part of the features",
    ),
)


def reason_of(name: str) -> str:
    return next((why for words, why in _REASONS if re.search(words, name)), UNKNOWN)
