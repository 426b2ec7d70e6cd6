"""Puts the model's first token before every prompt: text, chat messages and token ids alike."""

from typing import Any

from vllm.renderers.hf import HfRenderer

from xlstm7b.tokenizer import with_first_token


class XLSTMRenderer(HfRenderer):
    """The released model was trained with it, but the released tokenizer does not add it."""

    def _process_tokens(self, prompt: Any, **options: Any) -> Any:
        return super()._process_tokens(self._begin(prompt), **options)

    async def _process_tokens_async(self, prompt: Any, **options: Any) -> Any:
        return await super()._process_tokens_async(self._begin(prompt), **options)

    def _begin(self, prompt: Any) -> Any:
        config = self.model_config.hf_config.to_model_config()
        return {**prompt, "prompt_token_ids": with_first_token(config, prompt["prompt_token_ids"])}
