# SPDX-License-Identifier: Apache-2.0
"""Raw records → batches, with the encoders of a run: what prediction reads."""
