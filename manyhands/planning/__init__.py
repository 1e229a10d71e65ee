# SPDX-License-Identifier: Apache-2.0
"""Config + machine + wishes → Plan, each choice with its reason."""
