"""The gateway's first settings: its addresses, its model, and what requests may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.plugins import kinds
from baton.rpc.tls import settings as tls_settings


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of addresses, of the model, and of what requests may ask of it."""

    rest_listen: str = field(
        default="127.0.0.1:8000",
        metadata={"help": "Address of the REST API; /metrics is there too.", "metavar": "HOST:PORT"},
    )
    grpc_listen: str = field(
        default="127.0.0.1:8001", metadata={"help": "Address of the public gRPC API.", "metavar": "HOST:PORT"}
    )
    rest_tls_certificate: str = field(default="", metadata=tls_settings.EDGE_CERTIFICATE)
    rest_tls_key: str = field(default="", metadata=tls_settings.EDGE_KEY)
    rest_tls_client_ca: str = field(default="", metadata=tls_settings.EDGE_CLIENT_CA)
    grpc_tls_certificate: str = field(default="", metadata=tls_settings.EDGE_CERTIFICATE)
    grpc_tls_key: str = field(default="", metadata=tls_settings.EDGE_KEY)
    grpc_tls_client_ca: str = field(default="", metadata=tls_settings.EDGE_CLIENT_CA)
    router: tuple[str, ...] = field(
        default=("127.0.0.1:8100",),
        metadata={"help": "Routers, the preferred one first.", "metavar": "HOST:PORT,.."},
    )
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    model: str = field(
        default="",
        metadata={
            "help": "Folder (or hub id, or GGUF file) with the model's tokenizer, chat template and generation config.",
            "metavar": "PATH",
        },
    )
    revision: str = field(
        default="",
        metadata={"help": "Branch, tag or commit of a hub id. Empty: its main branch.", "metavar": "NAME"},
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "The model's names for clients, separated by spaces or commas. Answers carry the first, which is "
            "the workers' name too. Given twice, the last counts. Empty: the folder's name.",
            "metavar": "NAME [NAME ..]",
            "spaced": True,
        },
    )
    tool_call_parser: str = field(
        default="auto",
        metadata={
            "help": "How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, deepseek_v31, "
            "kimi_k2, glm45, gpt-oss, pythonic, ... (a wrong name is answered with all), a plugin's, or none. auto: by "
            "its chat template and architecture.",
            "metavar": "NAME",
        },
    )
    reasoning_parser: str = field(
        default="auto",
        metadata={
            "help": "How the model writes its reasoning: deepseek_r1, qwen3, mistral, glm45, gpt-oss, kimi_k2, ... (a "
            "wrong name is answered with all), a plugin's, or none. auto: by its chat template and architecture.",
            "metavar": "NAME",
        },
    )
    tool_parser_plugin: str = field(
        default="",
        metadata={"help": "A Python file with TOOL_FORMATS or REASONING_FORMATS of your own.", "metavar": "PATH"},
    )
    tool_server: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "MCP servers whose tools responses may use by label (tools: [{type: mcp, server_label: LABEL}]); "
            "HOST:PORT: http://HOST:PORT/sse. Without a label, the host's name. Needs the extra mcp.",
            "metavar": "[LABEL=]URL,..",
        },
    )
    allowed_mcp_servers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "MCP servers that requests may name by server_url: these URLs, and paths below them. Empty: none. "
            "Needs the extra mcp.",
            "metavar": "URL,..",
        },
    )
    mcp_timeout: float = field(
        default=30.0, metadata={"help": "Seconds that one call of an MCP tool may take.", "minimum": 0.1}
    )
    max_tool_rounds: int = field(
        default=16,
        metadata={"help": "Generations of one response that may call MCP tools; the next must answer.", "minimum": 1},
    )
    max_tool_output_bytes: int = field(
        default=64 << 10,
        metadata={"help": "Bytes of an MCP call's output that the model is shown; the rest is cut.", "minimum": 256},
    )
    plugins: tuple[str, ...] = field(default=(), metadata=kinds.SETTING)
    chat_template: str = field(
        default="",
        metadata={"help": "A Jinja file to use instead of the model's own chat template.", "metavar": "PATH"},
    )
    trust_request_chat_template: bool = field(
        default=False, metadata={"help": "Requests may bring a chat_template of their own; it runs in a sandbox."}
    )
    trust_control_tokens: bool = field(
        default=False,
        metadata={
            "help": "Control tokens (such as <|im_end|>) that messages spell are control tokens; else they are text."
        },
    )
    default_chat_template_kwargs: str = field(
        default="",
        metadata={
            "help": "Variables of the chat template for requests that do not set them, as a JSON object.",
            "metavar": "JSON",
        },
    )
    adapter_miss_seconds: float = field(
        default=10.0,
        metadata={
            "help": "How long a name is refused without asking workers, after their resolvers of adapters "
            "(--lora-resolvers) could not load it.",
            "minimum": 0.0,
        },
    )
    strict_fields: bool = field(
        default=False,
        metadata={"help": "Refuse requests with fields that this API does not have, instead of listing them."},
    )
    generation_config: str = field(
        default="auto",
        metadata={
            "help": "Sampling defaults of requests: a generation_config.json or its folder. auto: the model's own; "
            "none: neutral values.",
            "metavar": "PATH",
        },
    )
    override_generation_config: str = field(
        default="",
        metadata={
            "help": 'Sampling defaults that go before those of --generation-config: {"temperature": 0.5}, and so on.',
            "metavar": "JSON",
        },
    )
    enable_tokenizer_info_endpoint: bool = field(
        default=False,
        metadata={"help": "Serve GET /tokenizer_info and gRPC's GetTokenizer: tokenizer files and chat template."},
    )
    stream_interval: int = field(
        default=1,
        metadata={
            "help": "Tokens of each event of a stream. The first token is sent at once, and the rest at the end.",
            "minimum": 1,
            "maximum": 65_536,
        },
    )
    enable_force_include_usage: bool = field(
        default=False, metadata={"help": "Every stream ends with its usage, whether or not the request asks for it."}
    )
    default_max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "max_tokens of chats that give none. None: the generation config's max_new_tokens, or as many as "
            "the context holds.",
            "minimum": 1,
        },
    )
    max_choices: int = field(
        default=128, metadata={"help": "The most choices (n) of one request.", "minimum": 1, "maximum": 16384}
    )
    max_prompts: int = field(
        default=1024, metadata={"help": "The most prompts of one completions request.", "minimum": 1}
    )
    max_logprobs: int = field(
        default=20,
        metadata={"help": "The most top_logprobs; -1: the whole vocabulary.", "minimum": -1, "maximum": 1000},
    )
    max_answer_logprobs: int = field(
        default=1_000_000,
        metadata={
            "help": "The most log-probabilities of one answer that is not streamed: choices x tokens x alternatives, "
            "some 80 bytes each.",
            "minimum": 1,
        },
    )
