# A program as others write it, without types.
# mypy: ignore-errors
"""Trains a tiny model with random weights by Hugging Face's Trainer on the CPU; prints what the evaluation comes to."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    """An odd number of random sentences, so that the last batch is filled up."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 64, (size, 12), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": int(self.words[index].sum() % 2)}


def main(folder):
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16))
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        logging_steps=1,
        report_to=[],
        seed=3,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(53, 0), eval_dataset=Sentences(21, 1))
    trainer.train()
    print(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main(sys.argv[1])
