# SPDX-License-Identifier: Apache-2.0
"""`manyhands doctor`: hosts and the ways between them, looked at before a run."""
