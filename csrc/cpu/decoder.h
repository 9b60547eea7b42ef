// The decoder of Qwen2, Qwen3 and Llama on a CPU in float32, for sampling: rows of tokens in, logits out, one thread a call.
#pragma once
#include <vector>

#include "key_value_cache.h"

namespace maxrl::cpu {

// A token and the tokens that it attends to: `prefix_length` tokens of a cache that rows may share, then `own_length` of its
// own cache. Its own key and value are written last in its own cache, or in the prefix if it has none.
struct DecoderRow {
  int64_t token, position;
  KeyValueCache* prefix;
  int64_t prefix_length;
  KeyValueCache* own;  // null in a prompt
  int64_t own_length;
};

// The working memory of a thread.
struct Workspace {
  std::vector<float> hidden, normed, qkv, attended, gate_up, activated, logits;  // rows of row_stride(their length)
  std::vector<float> scores, mixed;  // for a tile of queries
  std::vector<float> probabilities;   // with `order`, for sampling from a row of logits
  std::vector<int64_t> order;
};

class Decoder {
 public:
  static constexpr int64_t kMostRows = 96;  // in one call of forward

  // cos, sin: [positions, head_dim / 2], of the rotary embedding.
  Decoder(const DecoderSizes& sizes, int64_t positions, const float* cos, const float* sin);

  // Packs the weights, and does not keep the given ones.
  void load(const DecoderWeights& weights, int num_threads);

  // Computes the logits of rows `first` to `num_rows` - 1, [num_rows - first] rows of row_stride(vocab) numbers in
  // workspace.logits, and writes all keys and values. Rows that share a prefix should be adjacent.
  void forward(const DecoderRow* rows, int64_t num_rows, int64_t first, Workspace& workspace) const;

  // Makes a workspace large enough for prompts of at most this length. This allocates memory; forward does not.
  void prepare(Workspace& workspace, int64_t longest_prompt, int64_t max_new_tokens) const;

  const DecoderSizes& sizes() const { return sizes_; }

 private:
  struct Matrix {  // packed
    int64_t out = 0, in = 0;
    std::vector<float> panels, bias;  // bias: padded to panels, or empty
    void pack(const float* weights, int64_t first, int64_t rows, int64_t step, int num_threads);
    void reset(int64_t out, int64_t in);
  };
  struct Layer {
    std::vector<float> input_norm, post_norm, q_norm, k_norm;
    Matrix qkv, o, gate_up, down;  // gate_up: a panel of gates, the same panel of ups, and so on
  };

  template <typename Vectors>
  void rms_norm(const float* x, int64_t rows, const std::vector<float>& weight, float* y) const;
  template <typename Vectors>
  void rotate_and_store(const Layer& layer, int64_t index, const DecoderRow* rows, int64_t num_rows, float* qkv) const;
  template <typename Vectors>
  void attend(int64_t layer, const DecoderRow* rows, int64_t num_rows, const float* qkv, Workspace& workspace) const;
  template <typename Vectors>
  void activate(int64_t num_rows, Workspace& workspace) const;
  template <typename Vectors>
  void attend_tile(int64_t layer, int64_t head, const DecoderRow* rows, int64_t first, int count, const float* qkv,
                   Workspace& workspace) const;

  DecoderSizes sizes_;
  int64_t qkv_size_, query_size_;
  std::vector<float> cos_, sin_, embedding_, norm_;
  std::vector<Layer> layers_;
  Matrix head_;
};

}  // namespace maxrl::cpu
