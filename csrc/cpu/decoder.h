// The decoder of Qwen2, Qwen3 and Llama on a CPU, for sampling: from rows of tokens to logits, one
// thread per call.
//
// Matrix multiplications and attention are in float32 or in bfloat16 with float32 sums (numbers.h);
// all else is in float32.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "aligned.h"
#include "key_value_cache.h"

namespace maxrl::cpu {

// A token and the caches that it attends to: `prefix_length` tokens of a cache that rows may share,
// then `own_length` tokens of its own. The token's key and value are the last ones of its own
// cache, or of the prefix if it has no own cache.
struct DecoderRow {
  int64_t token, position;
  KeyValueCache* prefix;
  int64_t prefix_length;
  KeyValueCache* own;  // null for tokens of a prompt
  int64_t own_length;
};

// Scratch memory of one thread.
struct Workspace {
  // of float: [row][row_stride(size)], the last two of a tile of queries
  AlignedBytes hidden, normed, qkv, attended, gate_up, activated, logits, scores, mixed;
  std::vector<float> probabilities;  // [vocab], for sampling
  std::vector<int64_t> order;  // [vocab], for sampling
  AlignedBytes rounded;  // BFloat16: the rows of a product
};

// A prompt that has been read.
struct PromptState {
  std::unique_ptr<KeyValueCache> cache;
  std::vector<float> logits;  // [vocab], of its last token
};

// A matrix in panels, in the Layout of the decoder's numbers.
struct PackedMatrix {
  int64_t out = 0, in = 0;
  AlignedBytes panels;
  AlignedBytes bias;  // of float, padded to whole panels, or null

  template <typename Layout>
  void reset(Layout, int64_t out, int64_t in);
  // Packs `rows` rows, starting at output row `first`; successive panels are `step` panels apart.
  template <typename Layout>
  void pack(Layout, const float* weights, int64_t first, int64_t rows, int64_t step,
            int num_threads);
  // Calls sink(i, panel, row) for the products of rows that are `stride` floats apart.
  template <typename Sink>
  void multiply(Arithmetic arithmetic, int64_t num_rows, const float* from, int64_t stride,
                BFloat16* rounded, const Sink& sink) const;
};

class Decoder {
 public:
  static constexpr int64_t kMaxRows = 96;  // per call of forward

  // Throws std::invalid_argument if this machine does not have the instructions.
  explicit Decoder(const DecoderOptions& options);

  void load(const DecoderWeights& weights);

  // Prompts of which further samples may be asked for, by their tokens, and the bytes of their
  // caches. They are those of the weights, so `load` forgets them.
  std::map<std::vector<int64_t>, PromptState> kept;
  int64_t kept_bytes = 0;
  void forget() {
    kept.clear();
    kept_bytes = 0;
  }

  // Writes keys and values of all rows to their caches, and the logits of rows `first` to
  // `num_rows` - 1 to workspace.logits, [num_rows - first][row_stride(vocab)]. It is fastest if
  // rows that share a prefix are adjacent.
  void forward(const DecoderRow* rows, int64_t num_rows, int64_t first, Workspace& workspace) const;

  // Allocates a workspace for sequences of at most these lengths; forward allocates nothing.
  void prepare(Workspace& workspace, int64_t longest_prompt, int64_t max_new_tokens) const;

  const DecoderSizes& sizes() const { return sizes_; }

 private:
  struct Layer {
    std::vector<float> input_norm, post_norm, q_norm, k_norm;
    PackedMatrix qkv, o, gate_up, down;  // gate_up: panels of gate and up alternate
  };

  template <typename Vectors>
  void rotate_and_store(const Layer& layer, int64_t index, const DecoderRow* rows, int64_t num_rows,
                        float* qkv) const;
  template <typename Numbers>
  void attend(int64_t layer, const DecoderRow* rows, int64_t num_rows, const float* qkv,
              Workspace& workspace) const;
  template <typename Numbers>
  void attend_tile(int64_t layer, int64_t head, const DecoderRow* rows, int64_t first, int count,
                   const float* qkv, Workspace& workspace) const;

  DecoderSizes sizes_;
  int64_t qkv_size_, query_size_;
  std::vector<float> cos_, sin_, embedding_, norm_;
  std::vector<Layer> layers_;
  PackedMatrix head_;
};

}  // namespace maxrl::cpu
