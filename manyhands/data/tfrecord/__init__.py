# SPDX-License-Identifier: Apache-2.0
"""TFRecord files of tf.train.Example, read and written many records at a time."""
