"""Refused."""

# pyright: basic

from tests.catalogue.case import Case

CASES: list[Case] = []
