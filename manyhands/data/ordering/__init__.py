# SPDX-License-Identifier: Apache-2.0
"""In which order an epoch visits records, and the random numbers that belong to each."""
