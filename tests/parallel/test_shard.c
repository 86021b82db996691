#include "parallel/model.h"
#include "support/cunit_suite.h"

#include <string.h>

static struct dskv_model model_of(int32_t n_heads, int32_t n_kv_heads, int32_t mlp, int32_t vocab)
{
    return (struct dskv_model){.n_heads = n_heads, .n_kv_heads = n_kv_heads, .mlp = mlp, .vocab = vocab};
}

static struct dskv_shard shard_of(const struct dskv_model *model, int rank, int n_ranks)
{
    struct dskv_shard shard;
    CU_ASSERT_EQUAL(dskv_shard_of(model, rank, n_ranks, &shard, NULL), DSKV_EXIT_OK);
    return shard;
}

static void fourteen_heads_over_four_ranks(void)
{
    struct dskv_model model = model_of(14, 2, 64, 64);
    const int32_t first[] = {0, 4, 8, 11}, count[] = {4, 4, 3, 3};
    const int32_t first_kv[] = {0, 0, 1, 1}, count_kv[] = {1, 2, 1, 1}, first_export[] = {0, 1, 2, 2},
                  count_export[] = {1, 1, 0, 0};
    for (int rank = 0; rank < 4; rank++) {
        struct dskv_shard s = shard_of(&model, rank, 4);
        CU_ASSERT_EQUAL(s.first_head, first[rank]);
        CU_ASSERT_EQUAL(s.n_heads_local, count[rank]);
        CU_ASSERT_EQUAL(s.first_kv_head, first_kv[rank]);
        CU_ASSERT_EQUAL(s.n_kv_heads_local, count_kv[rank]);
        CU_ASSERT_EQUAL(s.first_export_head, first_export[rank]);
        CU_ASSERT_EQUAL(s.n_export_heads, count_export[rank]);
    }
}

static void columns_split_in_units(void)
{
    struct dskv_model model = model_of(8, 8, 688, 257); /* 11 units, the last of 48; 5 units, the last of 1 */
    const int32_t first_mlp[] = {0, 192, 384, 576}, n_mlp[] = {192, 192, 192, 112};
    const int32_t first_vocab[] = {0, 128, 192, 256}, n_vocab[] = {128, 64, 64, 1};
    for (int rank = 0; rank < 4; rank++) {
        struct dskv_shard s = shard_of(&model, rank, 4);
        CU_ASSERT_EQUAL(s.first_mlp, first_mlp[rank]);
        CU_ASSERT_EQUAL(s.n_mlp_local, n_mlp[rank]);
        CU_ASSERT_EQUAL(s.first_vocab, first_vocab[rank]);
        CU_ASSERT_EQUAL(s.n_vocab_local, n_vocab[rank]);
    }
    model = model_of(4, 1, 60, 130);
    CU_ASSERT_EQUAL(shard_of(&model, 3, 4).n_mlp_local, 0);
    CU_ASSERT_EQUAL(shard_of(&model, 3, 4).first_mlp, 60);
    CU_ASSERT_EQUAL(shard_of(&model, 3, 4).n_vocab_local, 0);
    CU_ASSERT_EQUAL(shard_of(&model, 3, 4).first_vocab, 130);
}

/* Every head, column and id belongs to one rank, in order; every KV head is where its query heads are, and is exported
 * by the lowest of its holders. */
static void check_whole(const struct dskv_model *model, int n_ranks)
{
    int32_t head = 0, export_head = 0, mlp = 0, vocab = 0, most = 0, least = model->n_heads;
    int32_t group = model->n_heads / model->n_kv_heads;
    for (int rank = 0; rank < n_ranks; rank++) {
        struct dskv_shard s = shard_of(model, rank, n_ranks);
        CU_ASSERT(s.rank == rank && s.n_ranks == n_ranks);
        CU_ASSERT(s.first_head == head && s.n_heads_local >= 1);
        CU_ASSERT(s.first_mlp == mlp && s.n_mlp_local >= 0 && s.first_vocab == vocab && s.n_vocab_local >= 0);
        CU_ASSERT(s.n_mlp_local == 0 || s.first_mlp % DSKV_SPLIT_UNIT == 0);
        CU_ASSERT(s.n_vocab_local == 0 || s.first_vocab % DSKV_SPLIT_UNIT == 0);
        CU_ASSERT(s.first_kv_head == head / group);
        CU_ASSERT(s.first_kv_head + s.n_kv_heads_local == (head + s.n_heads_local - 1) / group + 1);
        CU_ASSERT(s.n_export_heads >= 0 && s.first_export_head == export_head);
        CU_ASSERT(s.n_export_heads == 0 ||
                  (s.first_export_head >= s.first_kv_head &&
                   s.first_export_head + s.n_export_heads <= s.first_kv_head + s.n_kv_heads_local));
        head += s.n_heads_local;
        export_head += s.n_export_heads;
        mlp += s.n_mlp_local;
        vocab += s.n_vocab_local;
        most = s.n_heads_local > most ? s.n_heads_local : most;
        least = s.n_heads_local < least ? s.n_heads_local : least;
    }
    CU_ASSERT(head == model->n_heads && export_head == model->n_kv_heads && mlp == model->mlp && vocab == model->vocab);
    CU_ASSERT(most - least <= 1);
}

static void shards_make_the_whole(void)
{
    for (int32_t n_kv_heads = 1; n_kv_heads <= 16; n_kv_heads++)
        for (int32_t group = 1; group <= 8; group++)
            for (int n_ranks = 1; n_ranks <= n_kv_heads * group && n_ranks <= 16; n_ranks++) {
                struct dskv_model model =
                    model_of(n_kv_heads * group, n_kv_heads, 1 + 37 * group, 1 + 101 * n_kv_heads);
                check_whole(&model, n_ranks);
            }
    struct dskv_model gpt2 = model_of(12, 12, 3072, 50257), odd = model_of(32, 8, 14336, 32001);
    for (int n_ranks = 1; n_ranks <= 12; n_ranks++) {
        check_whole(&gpt2, n_ranks);
        check_whole(&odd, n_ranks);
    }
}

static void too_many_ranks_are_refused(void)
{
    struct dskv_model model = model_of(6, 2, 64, 64);
    struct dskv_shard shard;
    struct dskv_error error;
    CU_ASSERT_EQUAL(dskv_shard_of(&model, 0, 7, &shard, &error), DSKV_EXIT_USAGE);
    CU_ASSERT(strstr(error.message, "7 ranks") && strstr(error.message, "6 query heads"));
    CU_ASSERT_STRING_EQUAL(error.valid, "1 to 6");
    model = model_of(128, 128, 64, 64);
    CU_ASSERT_EQUAL(dskv_shard_of(&model, 0, DSKV_MAX_RANKS + 1, &shard, &error), DSKV_EXIT_USAGE);
    CU_ASSERT_STRING_EQUAL(error.valid, "1 to 64");
}

int main(void)
{
    return dskv_run_tests("parallel.shard", (struct dskv_test[]){
                                                {"fourteen heads over four ranks", fourteen_heads_over_four_ranks},
                                                {"columns split in units", columns_split_in_units},
                                                {"shards make the whole", shards_make_the_whole},
                                                {"too many ranks are refused", too_many_ranks_are_refused},
                                                {NULL, NULL},
                                            });
}
