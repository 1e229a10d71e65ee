"""As warm_worker: for tasks that import Lightning or transformers, which takes many seconds."""

import importlib

from tests.support.warm_worker import companion as companion
from tests.support.warm_worker import main as main

for _name in (
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
):
    importlib.import_module(_name)
