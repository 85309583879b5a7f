"""Batches for models of any modality, from what their config and the arguments of their forward say.

`example_batches` gives inputs without labels, plain ones first: enough to learn which module feeds which.
`training_batches` gives the fullest first, with labels for the model's head where it takes some: enough to compare
losses and gradients. Neither knows models by name, so a batch is a guess, and the caller goes on to the next one when
the model does not run on it.

Sizes: B samples, S tokens, C channels, H x W pixels, F frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..utils.tensors import map_tensors
from .config import native_model, text_part
from .cross_attention import made_up_states, states_argument
from .example_images import (
    PLACEHOLDERS,
    SAMPLES,
    Batch,
    PictureMaker,
    channels_of,
    image_size_of,
    pair_of,
    part_of,
    size_in,
)
from .placeholders import feature_counts

CHOICES = 2
_PLAIN_LENGTH, _LENGTH = 8, 12
_FIRST_WORD, _LAST_WORD = 5, 99  # ids that are no padding, start or end token in any usual vocabulary
_IGNORE = -100
_IMAGES, _SOUNDS = ("pixel_values", "pixel_values_videos", "flattened_patches"), ("input_features", "input_values")
_BESIDES_TEXT = ("pixel", "patches", "image", "video", "audio", "visual", "bbox", *_SOUNDS)  # in names of arguments
_SOUND_PLACEHOLDERS = ("audio_token_id", "audio_token_index")
_SOUND_TYPE = 3  # of a place, where 1 is that of an image
_FRAME_MASKS = {"input_features_mask", "feature_attention_mask"}
_FRAME_LENGTHS = {"chunk_sample_lengths"}
_SAMPLES_OF_SOUND = 8000  # half a second: two dozen frames of a usual encoder, more than masks and context take
_FRAMES_OF_SOUND = 32
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")


def example_batches(model: nn.Module) -> Iterator[Batch]:
    """Batches without labels that a transformers model may accept, likely ones first; text alone before text with
    images. Those of a model without weights have their whole numbers on the CPU.
    """
    maker = _Maker(model)
    maker.keeps_numbers = maker.device.type == "meta"
    if maker.main == "pixel_values" and "input_ids" not in maker.arguments:
        yield maker.placed(maker.images(zeros=True))
    elif maker.main == "input_features":
        for heard in maker.spectra(zeros=True):
            yield maker.placed({**heard, **maker.decoder_ids()})
    elif maker.main != "pixel_values":
        for shape in ((SAMPLES, _PLAIN_LENGTH), (1, _PLAIN_LENGTH), (SAMPLES, CHOICES, _PLAIN_LENGTH)):
            yield maker.placed(
                {
                    "input_ids": _counting_ids(*shape),
                    **{key: value[: shape[0]] for key, value in maker.decoder_ids().items()},
                }
            )
    for inputs in maker.full():
        yield maker.placed(inputs)


def training_batches(model: nn.Module, seed: int = 2) -> Iterator[Batch]:
    """Batches with labels where the model takes some, the fullest first; all but plain text with a padded sample.

    Other seeds give other numbers in batches of the same shapes and order.
    """
    maker = _Maker(model, seed)
    for inputs in maker.full():
        rows = len(inputs.get("input_ids", range(SAMPLES)))
        for labels in maker.labels(inputs):
            yield maker.placed({**inputs, **{key: value[:rows] for key, value in labels.items()}, **maker.switches()})
    for inputs in maker.full():
        yield maker.placed({**inputs, **maker.switches()})


def takes_more_than_text(model: nn.Module, example: Any = None) -> bool:
    """Whether batches hold images or sounds, or places in them; `example` is one, where there is one."""
    names = example if isinstance(example, Mapping) else inspect.signature(model.forward).parameters
    return any(part in name for name in names for part in _BESIDES_TEXT)


def check_example(batch: Any) -> None:
    """ValueError unless `batch`, which a user gave as example_inputs, may be a batch."""
    if batch is None or isinstance(batch, Mapping | tuple | list | torch.Tensor):
        return
    meant = "; call it" if callable(batch) else ""
    raise ValueError(
        f"example_inputs={batch!r} must be a batch as the model takes it: a dict of keyword arguments, a list or tuple "
        f"of positional ones, or one tensor; next(iter(dataloader)) is one{meant}"
    )


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss of a model's outputs; for a model without one, a fixed function of all its floating point outputs.

    That function weighs every element of an output tensor differently, so that exchanged samples, positions or channels
    change it, and its gradients reach everything that the outputs depend on.
    """
    if isinstance(outputs, torch.Tensor):
        return _weighted_mean(outputs)
    if not isinstance(outputs, Mapping):
        outputs = dict(enumerate(outputs))
    # GPT-2's double heads report two
    losses = [outputs[name] for name in ("loss", "mc_loss") if outputs.get(name) is not None]
    if losses:
        return torch.stack(losses).sum()
    found: list[torch.Tensor] = []
    map_tensors(found.append, [value for key, value in outputs.items() if key != "past_key_values"])
    tensors = {id(tensor): tensor for tensor in found if tensor.is_floating_point()}
    if not tensors:
        raise ValueError(
            f"outputs of {type(outputs).__name__} hold neither a loss nor a floating point tensor, only {list(outputs)}"
        )
    return torch.stack([_weighted_mean(tensor) for tensor in tensors.values()]).sum()


def has_loss(outputs: Any) -> bool:
    """Whether the model computed a loss itself."""
    return isinstance(outputs, Mapping) and outputs.get("loss") is not None


def _weighted_mean(tensor: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).mul_(0.7).cos_()
    return (tensor * weights.view(tensor.shape).to(tensor.dtype)).mean() + tensor.square().mean()


def _counting_ids(*shape: int) -> torch.Tensor:
    """[*shape], every row alike."""
    return torch.arange(_FIRST_WORD, _FIRST_WORD + shape[-1]).expand(shape).contiguous()


class _Maker(PictureMaker):
    """Makes the parts of a batch for one model.

    arguments   names that its forward takes; `required` without a default
    text, vision, audio     the configs of these parts, the model's own where it has no such part
    """

    def __init__(self, model: nn.Module, seed: int = 2) -> None:
        self.config: Any = getattr(model, "config", None)
        self.main: str = getattr(model, "main_input_name", "input_ids")
        self.model = native = native_model(model)
        parameters = inspect.signature(native.forward).parameters
        self.arguments = set(parameters)
        self.required = [
            name
            for name, one in parameters.items()
            if one.default is one.empty and one.kind < one.VAR_KEYWORD and one.kind != one.VAR_POSITIONAL
        ]
        self.samples = "sample" in parameters and parameters["sample"].default is True
        self.head = getattr(type(native), "native_class", type(native)).__name__
        self.keeps_numbers = False
        self.states = states_argument(model)
        param = next(model.parameters())
        self.device = param.device
        self.dtype = next(
            (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32
        )
        self.text = text_part(self.config)
        self.vision = part_of(self.config, "encoder" if self.head == "VisionEncoderDecoderModel" else "vision_config")
        if self.vision is self.config:  # T5Gemma 2
            self.vision = getattr(getattr(self.config, "encoder", None), "vision_config", self.config)
        self.audio = part_of(self.config, "audio_config")
        self._generator = torch.Generator().manual_seed(seed)

    def placed(self, batch: Batch) -> Batch:
        """On the model's device; images and sounds in its dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if self.keeps_numbers and not tensor.is_floating_point():
                return tensor
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

        return map_tensors(move, batch)

    def switches(self) -> Batch:
        """A contrastive loss where there is one; no noise of the model's own."""
        found = {"return_loss": True} if "return_loss" in self.arguments else {}
        return found | ({"sample": False} if self.samples else {})

    def full(self) -> Iterator[Batch]:
        """Everything that the model takes, then less and less of it."""
        for made in self._all():
            further = self._further_ids(made)
            if (states := self._encoder_states(made)) is not None:
                yield {**made, **further, **states}
            yield {**made, **further}

    def _all(self) -> Iterator[Batch]:
        takes_text = "input_ids" in self.arguments
        if {"image_pixel_values", "audio_input_features"} <= self.arguments:
            yield self.crops_and_sounds()
        pictures = [] if not set(_IMAGES) & self.arguments else [*self.patches(), *self.pictures(), self.videos()]
        sounds = [] if not set(_SOUNDS) & self.arguments else [*self.spectra(), *self.waveforms()]
        if takes_text:
            yield from self._seen_and_heard(pictures, sounds)
        for seen in filter(None, pictures):
            if takes_text:
                places = self._image_places(seen)
                yield {**seen, **self.words(places)}
                counted = self._counted(seen) if places else None
                if counted is not None and set(counted) != {places} and self._place_id(PLACEHOLDERS) is not None:
                    yield {**seen, **self._worded((counted, PLACEHOLDERS))}
                for other in (places // 4, places // 16, 2 * places):  # a projector may read several patches at once
                    if other:
                        yield {**seen, **self.words(other)}
                yield {**seen, **self.words()}
            for asked in self.prompts():
                yield {**seen, **asked}
            if not takes_text and (decoded := self.decoder_ids()):
                yield {**seen, **decoded}
        for heard in filter(None, sounds):
            if takes_text:
                yield from self._spoken(heard)
                yield {**heard, **self.words()}
            yield heard
            yield {**heard, **self.decoder_ids()}
        if takes_text:
            for made in (
                self.words(),
                self.words(ragged=False),
                self.choices(),
                {"input_ids": self.words(ragged=False)["input_ids"][:1]},
            ):
                yield made
                if "decoder_input_ids" in self.arguments:
                    yield {
                        **made,
                        **{key: value[: len(made["input_ids"])] for key, value in self.decoder_ids().items()},
                    }

    # --- parts ---

    def words(self, places: int = 0, ragged: bool = True) -> Batch:
        """ids and mask [B, S], the last sample padded at its end; `places` ids in front stand for images."""
        ids = self._random_ids(SAMPLES, _LENGTH)
        end = self._special("eos_token_id")
        mask = torch.ones_like(ids)
        if ragged:
            ids[-1, -3:] = self._special("pad_token_id") or 0
            mask[-1, -3:] = 0
        if end is not None:
            ids[0, -1] = ids[-1, -4 if ragged else -1] = end
        if places:
            token = self._place_id(PLACEHOLDERS)
            ids = torch.cat([torch.full((SAMPLES, places), _FIRST_WORD if token is None else token), ids], 1)
            mask = torch.cat([torch.ones(SAMPLES, places, dtype=mask.dtype), mask], 1)
        extra: Batch = {"bbox": torch.zeros(*ids.shape, 4, dtype=torch.long)} if "bbox" in self.arguments else {}
        for name in sorted({"mm_token_type_ids", "image_embeds_position_mask"} & self.arguments):
            extra[name] = (torch.arange(ids.shape[1]) < places).long().expand(ids.shape).contiguous()
        if "global_attention_mask" in self.arguments:  # the first token is one that all others see
            extra["global_attention_mask"] = (torch.arange(ids.shape[1]) == 0).long().expand(ids.shape).contiguous()
        if "image_attention_mask" in self.arguments and "image_pixel_values" not in self.arguments:
            extra["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
        return {"input_ids": ids, **({"attention_mask": mask} if "attention_mask" in self.arguments else {}), **extra}

    def _place_id(self, names: tuple[str, ...]) -> int | None:
        """The id that stands for an image or a sound; None where none does."""
        return next((value for name in names if (value := getattr(self.config, name, None)) is not None), None)

    def _worded(self, *front: tuple[list[int], tuple[str, ...]]) -> Batch:
        """Texts with as many places in front as each sample has features, of images or sounds or of both; an ordinary
        word where others have more.

        front   features of each sample, names of the id that stands for them
        """
        texts = self.words()
        for counts, names in front:
            places = max(counts)
            stands = torch.full((SAMPLES, places), self._place_id(names) or 0)
            is_place = torch.arange(places) < torch.tensor(counts)[:, None]
            stands[~is_place] = _FIRST_WORD
            kind = _SOUND_TYPE if names is _SOUND_PLACEHOLDERS else 1
            known = {"attention_mask": torch.ones_like(stands), "mm_token_type_ids": kind * is_place.long()}
            shown = {key: value for key, value in known.items() if key in texts}
            texts |= {key: torch.cat([new, texts[key]], 1) for key, new in {"input_ids": stands, **shown}.items()}
        return texts

    def _seen_and_heard(self, pictures: Iterable[Batch], sounds: Iterable[Batch]) -> Iterator[Batch]:
        """Images and sounds with places for both in the texts, the first of each that the towers take."""
        if any(self._place_id(names) is None for names in (PLACEHOLDERS, _SOUND_PLACEHOLDERS)):
            return
        heard = [{**each, **self.frame_mask(each)} for each in sounds if "input_features" in each]
        found: list[tuple[Batch, list[int]]] = []
        for kind in (list(filter(None, pictures)), heard):
            taken = next(((each, counts) for each in kind if (counts := self._counted(each)) is not None), None)
            if taken is None:
                return
            found.append(taken)
        (picture, seen), (sound, spoken) = found
        yield {**picture, **sound, **self._worded((seen, PLACEHOLDERS), (spoken, _SOUND_PLACEHOLDERS))}

    def _spoken(self, heard: Batch) -> Iterator[Batch]:
        """Sounds and texts with their places: with a mask of the frames where the forward takes one, then without.
        Models without such places add sounds to words, one to one.
        """
        frames = size_in(self.config, "audio_length_per_tok")
        has_places = any(getattr(self.config, name, None) is not None for name in _SOUND_PLACEHOLDERS)
        takes_mask = "input_features" in heard and bool((_FRAME_MASKS | _FRAME_LENGTHS) & self.arguments)
        for masks in [self.frame_mask(heard), {}] if takes_mask else [{}]:
            if has_places and (counts := self._counted({**heard, **masks})) is not None:
                yield {**heard, **masks, **self._worded((counts, _SOUND_PLACEHOLDERS))}
        if not has_places and frames is not None and "input_features" in heard:
            yield {"input_features": self._noise(SAMPLES, self._bins(), frames * _LENGTH), **self.words()}

    def frame_mask(self, heard: Batch) -> Batch:
        """That every frame counts: [B, F], or the samples of sound [B] that its frames were made of; frames are what
        spectra have more of than bins.
        """
        spectrum = heard["input_features"]
        frames = spectrum.shape[1] if spectrum.shape[2] == self._bins() else spectrum.shape[2]
        names = (_FRAME_MASKS | {"padding_mask"}) & self.arguments
        found = {name: torch.ones(SAMPLES, frames, dtype=torch.long) for name in sorted(names)}
        for name in _FRAME_LENGTHS & self.arguments:
            found[name] = torch.full((SAMPLES,), frames * (size_in(self.audio, "hop_length") or 1))
        return found

    def _counted(self, inputs: Batch) -> list[int] | None:
        return feature_counts(self.model, self.placed(inputs), SAMPLES)

    def crops_and_sounds(self) -> Batch:
        """Images as their whole and one crop [B, 2, C, H, W], sounds [B, F, bins], and texts with places for both. The
        second sound is shorter.
        """
        size, patch = image_size_of(self.vision)[0], pair_of(self.vision.patch_size)[0]
        side = size // patch
        half = (side + 1) // 2  # places of a crop along one side, after which stands a mark
        sounds = torch.tensor([_FRAMES_OF_SOUND // self.audio.time_reduction - row for row in range(SAMPLES)])
        texts = self.words()
        seen = torch.full((SAMPLES, 2 * half * (half + 1) + 1), self.vision.image_token_id)
        heard = torch.full((SAMPLES, int(sounds.max())), self.audio.audio_token_id)
        heard[torch.arange(heard.shape[1]) >= sounds[:, None]] = _FIRST_WORD
        mask = torch.ones(SAMPLES, seen.shape[1] + heard.shape[1], dtype=torch.long)
        return {
            "input_ids": torch.cat([seen, heard, texts["input_ids"]], 1),
            "attention_mask": torch.cat([mask, texts["attention_mask"]], 1),
            "image_pixel_values": self._noise(SAMPLES, 2, channels_of(self.vision), size, size),
            "image_sizes": torch.tensor([[self.vision.crop_size] * 2] * SAMPLES),
            "image_attention_mask": torch.ones(SAMPLES, 2, side, side, dtype=torch.long),
            "audio_input_features": self._noise(SAMPLES, _FRAMES_OF_SOUND, self.audio.input_size),
            "audio_embed_sizes": sounds,
        }

    def choices(self) -> Batch:
        """Texts [B, C, S]."""
        return {"input_ids": self._random_ids(SAMPLES, CHOICES, _LENGTH)}

    def decoder_ids(self) -> Batch:
        takes = getattr(self.config, "is_encoder_decoder", False) or "decoder_input_ids" in self.arguments
        if takes and (channels := self._sound_channels()):
            return {"decoder_input_ids": _counting_ids(SAMPLES, _PLAIN_LENGTH, channels)}
        return {"decoder_input_ids": _counting_ids(SAMPLES, _PLAIN_LENGTH)} if takes else {}

    def spectra(self, zeros: bool = False) -> Iterator[Batch]:
        """[B, mels, F] for encoders that halve a fixed number of frames or cut them into windows, [B, F, mels] for the
        others, then [B, mels, F] of as many frames.
        """
        bins = self._bins()
        make = torch.zeros if zeros else self._noise
        if "input_features" in self.arguments:
            positions = size_in(self.audio, "max_source_positions")
            if positions and size_in(self.audio, "input_feat_per_channel") is None:
                yield {"input_features": make(SAMPLES, bins, 2 * positions)}
            if (window := size_in(self.audio, "n_window")) is not None:
                yield {"input_features": make(SAMPLES, bins, 4 * window)}
            yield {"input_features": make(SAMPLES, _FRAMES_OF_SOUND, bins)}
            if not zeros:
                yield {"input_features": make(SAMPLES, bins, _FRAMES_OF_SOUND)}
            return
        frames = size_in(self.audio, "max_length")
        if frames is not None and size_in(self.audio, "num_mel_bins"):
            yield {"input_values": make(SAMPLES, frames, bins)}

    def _bins(self) -> int:
        homes = (self.audio, part_of(self.config, "encoder_config"), getattr(self.audio, "asr_config", None))
        return next((size for home in homes for name in _BINS if (size := size_in(home, name))), 80)

    def waveforms(self) -> Iterator[Batch]:
        """[B, samples], and [B, 1, samples] where texts have places for them."""
        if "input_values" not in self.arguments:
            return
        made = self._noise(SAMPLES, _SAMPLES_OF_SOUND)
        yield {"input_values": made}
        if "input_ids" in self.arguments:
            yield {"input_values": made[:, None]}

    def labels(self, inputs: Batch) -> Iterator[Batch]:
        """Labels for the head, by what the forward takes, the likely ones first."""
        classes = max(getattr(self.config, "num_labels", 2), 1)
        text = inputs.get("input_ids")
        if "start_positions" in self.arguments and text is not None:
            yield {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}
        if "bool_masked_pos" in self.arguments:
            yield from self._masked_patches(inputs)
        if "labels" not in self.arguments:
            return
        per_sample = torch.arange(1, SAMPLES + 1) % classes
        targets = self._random_ids(SAMPLES, _PLAIN_LENGTH)
        targets[0, :2] = targets[1, 5:] = _IGNORE
        per_token: Batch = {}
        if text is not None and text.dim() == 2:
            per_token = {"labels": self._next_words(inputs)}
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in self.arguments and per_token:
                yield {**per_token, name: torch.tensor([0, 1])}
        if "TokenClassification" in self.head and text is not None and per_token:
            yield {
                "labels": (torch.arange(text.numel()).view(text.shape) % classes).masked_fill(
                    per_token["labels"] == _IGNORE, _IGNORE
                )
            }
        if "NextSentence" in self.head or "MultipleChoice" in self.head:
            yield {"labels": per_sample % CHOICES}
        if "Classification" in self.head:
            yield {"labels": per_sample}
            if classes == 1:
                yield {"labels": per_sample.float()}
        if self.head.endswith("ForQuestionAnswering"):  # answers out of a list, by how well they fit; or in words
            yield {"labels": torch.arange(SAMPLES * classes).view(SAMPLES, classes) % 3 / 2.0}
            yield {"labels": targets.clamp(min=_FIRST_WORD)}
        if getattr(self.config, "is_encoder_decoder", False) or (
            "input_features" in inputs and "Classification" not in self.head
        ):
            yield {"labels": targets}
        if per_token and "ImageClassification" not in self.head:
            yield per_token
        elif text is None:
            yield {"labels": targets.clamp(min=0)}
        yield {"labels": per_sample}

    # --- details ---

    def _masked_patches(self, inputs: Batch) -> Iterator[Batch]:
        """Every third patch is to be guessed: [B, patches]."""
        patch = pair_of(getattr(self.vision, "patch_size", 16) or 16)
        height, width = image_size_of(self.vision)
        patches = (height // patch[0]) * (width // patch[1])
        hidden = (torch.arange(patches) % 3 == 0).expand(SAMPLES, patches).contiguous()
        if "labels" in self.arguments:
            yield {"bool_masked_pos": hidden, "labels": torch.arange(int(hidden.sum())) % 7}
        yield {"bool_masked_pos": hidden}

    def _next_words(self, inputs: Batch) -> torch.Tensor:
        """The ids themselves; images, padding and the start of the first sample do not count."""
        ids = inputs["input_ids"]
        labels = ids.clone()
        labels[0, :3] = _IGNORE
        if "attention_mask" in inputs:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, _IGNORE)
        return labels.masked_fill(labels >= _LAST_WORD + 1, _IGNORE)

    def _further_ids(self, made: Batch) -> Batch:
        """Other texts that the forward insists on, or that come with a mask of their own (proteins, questions to an
        image).
        """
        found: Batch = {}
        for name in sorted(self.arguments):
            mask = name.removesuffix("input_ids") + "attention_mask"
            is_known = name in made or name in ("input_ids", "decoder_input_ids")
            if is_known or not name.endswith("input_ids") or not (name in self.required or mask in self.arguments):
                continue
            found[name] = self._random_ids(SAMPLES, _PLAIN_LENGTH)
            if mask in self.arguments:
                found[mask] = torch.ones_like(found[name])
        if self._sound_channels():
            found |= self.decoder_ids()
        return found

    def _sound_channels(self) -> int | None:
        """How many ids of a sound a decoder reads at a time, where it speaks."""
        is_speaker = "input_ids" in self.arguments and "decoder_input_ids" in self.arguments
        return size_in(getattr(self.config, "decoder_config", None), "num_channels") if is_speaker else None

    def _encoder_states(self, made: Batch) -> Batch | None:
        """What a decoder with cross-attention reads of an encoder that it is used without."""
        if self.states is None or "input_ids" not in made:
            return None
        states = made_up_states(self.model, len(made["input_ids"]), _PLAIN_LENGTH, self._generator)
        return None if states is None else {self.states: states}

    def _special(self, name: str) -> int | None:
        """A token that the text's config names; None where its vocabulary has no such token."""
        token, size = size_in(self.text, name), size_in(self.text, "vocab_size")
        return token if token is not None and (size is None or 0 <= token < size) else None

    def _random_ids(self, *shape: int) -> torch.Tensor:
        last = min(size_in(self.text, "vocab_size") or _LAST_WORD, _LAST_WORD)
        return torch.randint(min(_FIRST_WORD, last - 1), last, shape, generator=self._generator)
