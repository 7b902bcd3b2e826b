/* A whole GGUF model in memory, small and random: two layers, a byte-level vocabulary, weights in F32 and Q8_0. */
#ifndef TINY_GGUF_H
#define TINY_GGUF_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  TINY_HIDDEN = 64,
  TINY_INNER = 96,
  TINY_HEADS = 4,
  TINY_KV_HEADS = 2,
  TINY_LAYERS = 2,
  TINY_VOCAB = 280,
  TINY_CONTEXT = 256
};

typedef struct tiny_file {
  unsigned char *data;
  size_t size, room;
} tiny_file;

typedef struct tiny_entry {
  char name[64];
  uint64_t rows, cols; /* rows 0: a vector */
  uint32_t type;       /* 0 F32, 8 Q8_0 */
} tiny_entry;

static void tiny_put(tiny_file *f, const void *p, size_t n) {
  if (f->size + n > f->room) {
    f->room = (f->size + n) * 2;
    f->data = (unsigned char *)realloc(f->data, f->room);
    if (!f->data) abort();
  }
  memcpy(f->data + f->size, p, n);
  f->size += n;
}
static void tiny_u32(tiny_file *f, uint32_t v) { tiny_put(f, &v, 4); }
static void tiny_u64(tiny_file *f, uint64_t v) { tiny_put(f, &v, 8); }
static void tiny_text(tiny_file *f, const char *s) {
  tiny_u64(f, strlen(s));
  tiny_put(f, s, strlen(s));
}
static void tiny_key_u32(tiny_file *f, const char *key, uint32_t v) {
  tiny_text(f, key);
  tiny_u32(f, 4);
  tiny_u32(f, v);
}
static void tiny_key_f32(tiny_file *f, const char *key, float v) {
  tiny_text(f, key);
  tiny_u32(f, 6);
  tiny_put(f, &v, 4);
}
static void tiny_key_text(tiny_file *f, const char *key, const char *v) {
  tiny_text(f, key);
  tiny_u32(f, 8);
  tiny_text(f, v);
}
static void tiny_key_array(tiny_file *f, const char *key, uint32_t type, uint64_t n) {
  tiny_text(f, key);
  tiny_u32(f, 9);
  tiny_u32(f, type);
  tiny_u64(f, n);
}

/* 256 byte tokens, two merges, control tokens. */
static void tiny_vocabulary(tiny_file *f) {
  tiny_key_array(f, "tokenizer.ggml.tokens", 8, TINY_VOCAB);
  uint32_t next = 256;
  for (uint32_t b = 0; b < 256; b++) {
    int itself = (b >= 33 && b <= 126) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    uint32_t code = itself ? b : next++;
    char text[3] = {(char)code, 0, 0};
    if (code >= 0x80) {
      text[0] = (char)(0xc0 | code >> 6);
      text[1] = (char)(0x80 | (code & 63));
    }
    tiny_text(f, text);
  }
  tiny_text(f, "he");
  tiny_text(f, "hel");
  for (int i = 258; i < TINY_VOCAB; i++) {
    char name[16];
    snprintf(name, sizeof name, "<|%d|>", i);
    tiny_text(f, name);
  }
  tiny_key_array(f, "tokenizer.ggml.token_type", 5, TINY_VOCAB);
  for (int i = 0; i < TINY_VOCAB; i++) tiny_u32(f, i < 258 ? 1 : 3);
  tiny_key_array(f, "tokenizer.ggml.merges", 8, 2);
  tiny_text(f, "h e");
  tiny_text(f, "he l");
}

static size_t tiny_bytes(const tiny_entry *e) {
  uint64_t n = (e->rows ? e->rows : 1) * e->cols;
  return e->type == 8 ? n / 32 * 34 : n * 4;
}

static int tiny_entries(tiny_entry *e) {
  static const struct {
    const char *name;
    int rows, cols;
  } parts[] = {{"attn_norm", 0, TINY_HIDDEN},
               {"attn_q", TINY_HIDDEN, TINY_HIDDEN},
               {"attn_k", TINY_HIDDEN / 2, TINY_HIDDEN},
               {"attn_v", TINY_HIDDEN / 2, TINY_HIDDEN},
               {"attn_output", TINY_HIDDEN, TINY_HIDDEN},
               {"ffn_norm", 0, TINY_HIDDEN},
               {"ffn_gate", TINY_INNER, TINY_HIDDEN},
               {"ffn_up", TINY_INNER, TINY_HIDDEN},
               {"ffn_down", TINY_HIDDEN, TINY_INNER}};
  int n = 0;
  e[n++] = (tiny_entry){"token_embd.weight", TINY_VOCAB, TINY_HIDDEN, 8};
  e[n++] = (tiny_entry){"output_norm.weight", 0, TINY_HIDDEN, 0};
  for (int layer = 0; layer < TINY_LAYERS; layer++)
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++, n++) {
      snprintf(e[n].name, sizeof e[n].name, "blk.%d.%s.weight", layer, parts[i].name);
      e[n].rows = (uint64_t)parts[i].rows;
      e[n].cols = (uint64_t)parts[i].cols;
      e[n].type = parts[i].rows && i % 2 ? 8 : 0;
    }
  return n;
}

/* The header; *data_offset is where the tensors' data belongs. */
static tiny_file tiny_header(size_t *data_offset, size_t *data_bytes) {
  tiny_file f = {NULL, 0, 0};
  tiny_entry e[64];
  int n = tiny_entries(e);
  tiny_put(&f, "GGUF", 4);
  tiny_u32(&f, 3);
  tiny_u64(&f, (uint64_t)n);
  tiny_u64(&f, 16);
  tiny_key_text(&f, "general.architecture", "llama");
  tiny_key_u32(&f, "llama.block_count", TINY_LAYERS);
  tiny_key_u32(&f, "llama.context_length", TINY_CONTEXT);
  tiny_key_u32(&f, "llama.embedding_length", TINY_HIDDEN);
  tiny_key_u32(&f, "llama.feed_forward_length", TINY_INNER);
  tiny_key_u32(&f, "llama.attention.head_count", TINY_HEADS);
  tiny_key_u32(&f, "llama.attention.head_count_kv", TINY_KV_HEADS);
  tiny_key_u32(&f, "llama.vocab_size", TINY_VOCAB);
  tiny_key_f32(&f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  tiny_key_f32(&f, "llama.rope.freq_base", 10000.0f);
  tiny_key_text(&f, "tokenizer.ggml.model", "gpt2");
  tiny_key_text(&f, "tokenizer.ggml.pre", "smollm");
  tiny_vocabulary(&f);
  tiny_key_u32(&f, "tokenizer.ggml.eos_token_id", TINY_VOCAB - 1);
  size_t at = 0;
  for (int i = 0; i < n; i++) {
    tiny_text(&f, e[i].name);
    tiny_u32(&f, e[i].rows ? 2 : 1);
    tiny_u64(&f, e[i].cols);
    if (e[i].rows) tiny_u64(&f, e[i].rows);
    tiny_u32(&f, e[i].type);
    tiny_u64(&f, at);
    at += (tiny_bytes(&e[i]) + 31) / 32 * 32;
  }
  *data_offset = (f.size + 31) / 32 * 32;
  *data_bytes = at;
  return f;
}

/* The whole file; data is to be freed. */
static tiny_file tiny_gguf(void) {
  size_t offset, bytes;
  tiny_file f = tiny_header(&offset, &bytes);
  tiny_entry e[64];
  int n = tiny_entries(e);
  static const unsigned char zeros[64] = {0};
  uint32_t state = 1;
  tiny_put(&f, zeros, offset - f.size);
  for (int i = 0; i < n; i++) {
    size_t size = tiny_bytes(&e[i]);
    for (size_t done = 0; done < size;) {
      state = state * 1664525u + 1013904223u;
      float x = ((float)(state >> 8) / 16777216.0f - 0.5f) * 0.4f + (e[i].rows ? 0.0f : 1.0f);
      uint16_t scale = 0x1400; /* 2^-10 */
      if (e[i].type == 0) tiny_put(&f, &x, 4), done += 4;
      else if (done % 34 == 0) tiny_put(&f, &scale, 2), done += 2;
      else tiny_put(&f, (unsigned char *)&state + 3, 1), done += 1;
    }
    tiny_put(&f, zeros, (32 - f.size % 32) % 32);
  }
  return f;
}

#endif
