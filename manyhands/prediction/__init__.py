# SPDX-License-Identifier: Apache-2.0
"""What a model says of records → named columns in a file."""
