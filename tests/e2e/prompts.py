"""Twenty prompts of different kinds: prose, code, other languages, lists, odd white space, digits, emoji, very short ones."""

PROMPTS = [
    "The capital of Indonesia is",
    "Once upon a time, in a small village by the sea,",
    "def quicksort(items):\n    ",
    "import torch\n\nclass Attention(torch.nn.Module):\n    def __init__(self",
    "Q: What is 17 + 25?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Der schnellste Weg nach Berlin ist",
    "La vie est belle parce que",
    "Selamat pagi! Apa kabar",
    "今天天气很好，",
    "SELECT name, count(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:\n1.",
    "🙂🙂 hello   world\t\ttabs\n\n\nand lines",
    "A",
    "Translate to French: Good morning, my friend. ->",
    "#include <stdio.h>\nint main(void) {\n",
    "To be, or not to be, that is the question:",
    "Breaking news: scientists have discovered that",
]
