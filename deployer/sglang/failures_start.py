"""Failures of a start before the weights: arguments, the model's description, the Hub. Data.

Read top down, as `failure_rules` tells.
"""

from __future__ import annotations

from deployer.sglang.failure_rule import Rule, rule

START: tuple[Rule, ...] = (
    rule(
        "port-in-use",
        r"\[Errno 98\].*address already in use|is used by a process already"
        r"|[Aa]ddress already in use"
        r"|EADDRINUSE"
        r"|Error: .*[Pp]ort \d+ is (?:not available|already in use|in use|occupied)",
        "find the owner of the port (`deploy doctor`) and stop it, or choose another serve.port",
    ),
    rule(
        "address-not-here",
        r"\[Errno 99\].*bind|[Cc]annot assign requested address.*bind"
        r"|bind on address .*[Cc]annot assign",
        "serve.host is no address of the target: use 0.0.0.0 or one of its own",
        passing=True,
    ),
    rule(
        "address-not-here",
        r"^(?:\[[^\]]*\] )?ERROR: +\[Errno -\d\] ",
        "serve.host is a name that the target does not know: use 0.0.0.0 or one of its addresses",
        phases=("server", "ready"),
    ),
    rule(
        "permission",
        r"\[Errno 13\].*bind on address",
        "a port below 1024 is only for root: choose another serve.port",
    ),
    rule(
        "bad-arguments",
        r"error: unrecognized arguments:|error: argument --|error: ambiguous option:"
        r"|error: the following arguments are required",
        "correct serve.args in the playbook: this version's own parser refuses them",
        last=True,
    ),
    rule(
        "speculation-needs-extra-buffer",
        r"Speculative decoding for .* is not compatible with radix cache",
        "add serve.args mamba-scheduler-strategy: extra_buffer, or disable-radix-cache: true",
        last=True,
    ),
    rule(
        "extra-buffer-needs-radix",
        r"mamba extra_buffer is not compatible with --disable-radix-cache",
        "leave out one of mamba-scheduler-strategy: extra_buffer and disable-radix-cache",
        last=True,
    ),
    rule(
        "context-too-long",
        r"ValueError: .*context_length \(\d+\) is greater than the derived",
        "lower serve.args context-length to what the model's config allows",
        last=True,
    ),
    rule(
        "quantization-unsupported",
        r"Error: (?:Unknown|Invalid) quantization method"
        r"|Error: .*is not supported for quantization method",
        "this engine.version has no such quantization: another serve.args quantization (the "
        "model's config names its own), or another engine.version",
        last=True,
    ),
    rule(
        "quantization-mismatch",
        r"Quantization method specified in the model config",
        "remove serve.args quantization, or name the one of the model's config",
        last=True,
    ),
    rule(
        "unknown-model-type",
        r"does not recognize this architecture|Model architectures .* are not supported"
        r"|has no SG[Ll]ang implementation|Error: .*[Uu]nknown (?:RoPE scaling|rope)[ _]?type"
        r"|Error: `rope_(?:scaling|parameters)` must be"
        r"|is not supported for model \S+ or model type"
        r"|Error: GGUF model with architecture \S+ is not supported",
        "this engine does not know the model: choose a newer engine.version with its lock",
    ),
    rule(
        "unknown-model-type",
        r"^KeyError: '(?:qwen|llama|mi[sn]|gemma|deepseek|glm|phi|gpt|falcon|kimi|nemotron|ernie"
        r"|mimo|olmo|granite|cohere|exaone|intern|step|mamba|bamba|jamba|seed)[\w.-]*'\s*$",
        "this engine does not know the model: choose a newer engine.version with its lock",
        phases=("starting", "tokenizer"),
        last=True,
    ),
    rule(
        "model-config-missing",
        r"Unrecognized model in .*model_type|Error: Can't load the configuration of",
        "config.json is absent or empty: `deploy up --from shards` completes the weights",
        last=True,
    ),
    rule(
        "model-config-missing",
        r"Error: Can't load (?:image processor|feature extractor|processor|video processor) for",
        "preprocessor_config.json (or its like) is absent: `deploy up --from shards`",
        last=True,
        passing=True,
    ),
    rule(
        "model-path-missing",
        r"OSError: Repo id must be in the form|OSError: .* is not a local folder"
        r"|Incorrect path_or_model_id",
        "the folder in model.path does not exist on the target: `deploy up --from shards`",
        last=True,
    ),
    rule(
        "hub-refused",
        r"401 Client Error|403 Client Error|GatedRepoError|[Cc]annot access gated repo"
        r"|429 Client Error|trying to access a gated repo|Invalid user token"
        r"|RepositoryNotFoundError",
        "the Hub refused (a token that is missing or may not): model.path must be a local folder",
        passing=True,
    ),
    rule(
        "proxy",
        r"Error: .*(?:127\.0\.0\.1|localhost|0\.0\.0\.0).*(?:ProxyError"
        r"|[Uu]nable to connect to proxy)"
        # SGLang's own answers have none of these.
        r"|Error: res=<Response \[(?:403|407|502|504)\]>",
        "the server's own first request went to a proxy: serve.env NO_PROXY: 127.0.0.1,localhost",
        last=True,
    ),
    rule(
        "chat-template",
        r"Error: Chat template .* is not a built-in|jinja2\.exceptions\.\w+: ",
        "the chat template cannot be used: correct serve.args chat-template, or the model's own",
        last=True,
        passing=True,
    ),
    rule(
        "trust-remote-code",
        r"requires you to execute the .*file|trust_remote_code=True.* to remove this error"
        r"|contains custom code which must be executed",
        "the model brings its own code: read it, then add serve.args trust-remote-code: true",
        last=True,
    ),
    rule(
        "model-config-broken",
        r"config file at .* is not a valid JSON file|Error parsing .*config\.json",
        "a config file of the model is no JSON: `deploy up --from shards` checks every hash",
        last=True,
    ),
    rule(
        "tokenizer",
        r"Can't load tokenizer for|[Cc]ouldn't instantiate the backend tokenizer"
        r"|Tokenizer class \S+ does not exist|Unable to load vocabulary from file"
        r"|untagged enum \w+|[Ee]rror (?:while )?(?:loading|parsing) (?:the )?tokenizer"
        r"|Error.*(?:tokenizer\.json|tokenizer\.model|tokenizer_config\.json|vocab\.json)"
        r"|Failed to load the tokenizer",
        "the tokenizer's files are missing or broken: `deploy up --from shards` checks every hash",
        last=True,
        passing=True,
    ),
    rule(
        "tp-size-mismatch",
        r"Error: .*(?:is not|must be|should be|not) divisible by|too large tensor parallel size",
        "tp-size (or another size) does not divide what the model has: change tp-size",
        last=True,
    ),
    rule(
        "hub-unreachable",
        r"We couldn't connect to 'https?://|OfflineModeIsEnabled: "
        r"|Temporary failure in name resolution"
        r"|Error: .*host='[\w.-]*(?:huggingface\.co|hf-mirror"
        r"|modelscope)[\w.-]*'.*Max retries exceeded",
        "the server tried to reach the Hub: model.path must be a complete local folder",
        passing=True,
    ),
)
