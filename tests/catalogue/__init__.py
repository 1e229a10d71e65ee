"""A catalogue of odd tasks: each is trained to the bits of plain PyTorch, or refused by name.

No case, and not the reference, knows of manyhands: they are plain PyTorch. Only
`test_catalogue.py` brings the two together.
"""
