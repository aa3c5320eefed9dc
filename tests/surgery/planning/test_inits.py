"""What is said of an initialization and what computes it are of the same names."""

import pytest
from palimpsa_surgery.mixers.geometry import SCALE_FORMS
from palimpsa_surgery.surgery.conversion.initialization import STARTS
from palimpsa_surgery.surgery.planning.inits import DEFAULT_INIT, INITS, is_calibrated


def test_each_has_its_function():
    assert set(INITS) == set(STARTS)
    assert INITS[DEFAULT_INIT].exact, "by default nothing of the source is lost"


@pytest.mark.parametrize("name", INITS)
def test_what_is_said_of_it_is_whole(name):
    init = INITS[name]
    assert init.scale_form in SCALE_FORMS
    assert init.calibrated == ("{strength}" in init.meaning) == is_calibrated(name)


def test_a_name_that_is_none_needs_no_statistics():
    assert not is_calibrated(None)
    assert not is_calibrated("calibratd")
