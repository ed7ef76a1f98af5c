# pyright: strict
"""Mistakes that a type checker finds with `pl.Ref`: lines that end in `# wrong`."""

import pallasite as pl


def kernel(x_ref: pl.Ref, o_ref: pl.Ref) -> None:
    o_ref[...] = 2 * x_ref  # wrong
    o_ref["row"] = x_ref[...]  # wrong
    o_ref.shap  # wrong
    o_ref.shape = (1,)  # wrong
    o_ref[...] = "text"  # wrong
