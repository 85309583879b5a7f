"""The matrix of models: rows are classes of transformers, columns the axes of `shardwright.testing.matrix`.

python -m tests.models.matrix --family llama --axis tp2 --axis pp2     # some cells
python -m tests.models.matrix --json matrix.jsonl                      # all cells; begins again where it was ended
python -m tests.models.matrix --json matrix.jsonl --write              # the results, as data of the package and a page
"""
