"""Kernels of our own on a machine without a GPU: they compile for every released shape, and their shared memory is what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_eval.engines import few_rows
from vla_eval.engines.few_rows import Product, entries, tile_for
from vla_eval.engines.kernels import compiled, source_of
from vla_eval.policies.gr00t import dit
from vla_eval.policies.pi05 import expert
from vla_eval.policies.pi05.configuration import RELEASED
from vla_eval.types import VlaEvalError


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the user's cache keeps is not compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


SOURCE = source_of("few_rows.cu")
RELEASED_PRODUCTS = {
    41: (dit.products(dit.Shape(32, 32, 48, 1024, 6144, 132, 132, 40, 2)), 48),
    10: (expert.products(expert.Shape.of(RELEASED, 10, 32)), 256),
}


@pytest.mark.parametrize(("rows", "dtype"), [(41, "float16"), (10, "bfloat16")])
def test_every_product_of_the_released_models_compiles(rows: int, dtype: str) -> None:
    products, head_width = RELEASED_PRODUCTS[rows]
    tiles = {product: tile_for(product, rows) for product in products.values()}
    names = {product: f"product_{i}" for i, product in enumerate(tiles)}
    text = entries(names, tiles, head_width, rows)
    code = compiled(SOURCE + text, f"{few_rows.CARD}a", f'-DKIND="{few_rows.KINDS[dtype]}"', "-default-device")
    assert all(name.encode() in code for name in names.values())


def test_a_tile_counted_wrongly_does_not_compile() -> None:
    product = Product(1536, 1536, out="RESIDUAL")
    tile = tile_for(product, 48)
    text = entries({product: "one"}, {product: tile}, 48, 48).replace(str(tile.shared), str(tile.shared + 128))
    with pytest.raises(VlaEvalError, match="shared memory"):
        compiled(SOURCE + text, f"{few_rows.CARD}a", '-DKIND="f16"', "-default-device")


@pytest.mark.parametrize("product", [Product(1536, 100), Product(1 << 24, 64)])
def test_widths_that_no_tile_takes_are_refused(product: Product) -> None:
    with pytest.raises(ValueError, match="outputs"):
        tile_for(product, 48)


def test_more_rows_than_the_kernels_take_are_refused() -> None:
    with pytest.raises(ValueError, match="49 rows"):
        tile_for(Product(64, 64), 49)
