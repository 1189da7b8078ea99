"""A loaded model says how it computes; with --exact, one whose answers would not be exact is refused."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loading import model_loader
from tandem.engine.loading.model_loader import load_model
from tandem.runtime.errors import ConfigError
from tests.support.noise_model import ensure_noise_model

REASON = "a layer of this kind depends on the batch"


def test_the_layout_has_the_numerics_with_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(ensure_noise_model()), device="cpu")
    exact = load_model(config).layout.numerics
    assert exact.engine.startswith("tandem ") and exact.dtype == exact.kv_dtype != ""
    monkeypatch.setattr(model_loader, "exactness_problem", lambda config, loaded: REASON)
    numerics = load_model(config).layout.numerics
    assert numerics.problem == REASON and numerics.described() == f"not exact: {REASON} (numerics {numerics.digest})"
    with pytest.raises(ConfigError, match=f"--exact: answers of .* would not be exact: {REASON}; leave out --exact"):
        load_model(msgspec.structs.replace(config, exact=True))
