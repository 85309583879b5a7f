"""ChatGLM2 and 3: `configuration_chatglm` and `modeling_chatglm`, with the names of the published checkpoints."""
