"""Tests of manyhands.adapters."""
