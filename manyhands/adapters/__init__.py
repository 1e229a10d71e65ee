# SPDX-License-Identifier: Apache-2.0
"""Programs that were written for other trainers → tasks; what cannot be honoured is named."""
