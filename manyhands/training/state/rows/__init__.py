# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that are kept by rows: any 64-bit id has one, made when it is first needed.

    row_hash        an id's 64 scrambled bits; which of 1,024 buckets it belongs to
    row_init        first values, a function of (seed, table, id) and nothing else
    row_optimizers  what a gradient does to a row: SGD, Adagrad, Adam, FTRL
    sum_rows        gradients by position → gradients by id; the sum of two of those
    row_index       id → slot, in memory that outlives a process
    row_journal     why nothing of that memory is ever found half done
    row_slots       where rows lie
    row_store       one table: read, apply, admit, expire
    table_part      some of its rows, as plain arrays; digests
    load_rows       rows from elsewhere
    row_snapshot    the whole of a table as of one step, while it goes on

No result depends on slots, on the order in which rows came, or on who else was in a message.
"""
