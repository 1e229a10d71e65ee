# SPDX-License-Identifier: Apache-2.0
"""Raw columns → numbers: facts of the training records, encoders fitted to them, encoded tables."""
