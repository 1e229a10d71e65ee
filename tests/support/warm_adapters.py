"""As warm_worker: for tasks that import Lightning or transformers, which takes many seconds."""

import lightning.pytorch  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401

from tests.support.warm_worker import main as main
