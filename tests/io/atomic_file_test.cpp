#include "io/atomic_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep::io {
namespace atomic_file_test {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(AtomicFile, WritesANewFileAndReplacesAnOldOne) {
  ScratchFolder folder;
  write_file(folder / "a.txt", "first");
  EXPECT_EQ(folder.read("a.txt"), "first");
  write_file(folder / "a.txt", "second, and longer");
  EXPECT_EQ(folder.read("a.txt"), "second, and longer");
  write_file(folder / "a.txt", "");
  EXPECT_EQ(folder.read("a.txt"), "");
  EXPECT_THAT(folder.names(), ElementsAre("a.txt"));
}

TEST(AtomicFile, AppendsItsWrites) {
  ScratchFolder folder;
  AtomicFile file(folder / "a.txt");
  file.write("one, ");
  file.write("two", 3);
  file.commit();
  EXPECT_EQ(folder.read("a.txt"), "one, two");
}

TEST(AtomicFile, ShowsNothingBeforeCommit) {
  ScratchFolder folder;
  write_file(folder / "a.txt", "before");
  {
    AtomicFile file(folder / "a.txt");
    file.write("after");
    EXPECT_EQ(folder.read("a.txt"), "before");
  }
  EXPECT_EQ(folder.read("a.txt"), "before");
  EXPECT_THAT(folder.names(), ElementsAre("a.txt"));
}

TEST(AtomicFile, WritesIntoTheCurrentFolder) {
  ScratchFolder folder;
  std::filesystem::path old = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  write_file("plain.txt", "here");
  std::filesystem::current_path(old);
  EXPECT_EQ(folder.read("plain.txt"), "here");
}

TEST(AtomicFile, HonoursTheUmaskLikeAnyNewFile) {
  ScratchFolder folder;
  mode_t old = umask(0027);
  write_file(folder / "a.txt", "x");
  umask(old);
  struct stat status {};
  ASSERT_EQ(stat((folder / "a.txt").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u);
}

TEST(AtomicFile, RefusesAMissingFolder) {
  ScratchFolder folder;
  EXPECT_THAT(error_of([&] { write_file(folder / "missing" / "a.txt", "x"); }), Fails(Error::file));
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(AtomicFile, ReplacesWhatLinksLeadToAndKeepsTheLinks) {
  const ScratchFolder folder, other_disk;
  other_disk.write("target", "old");
  std::filesystem::create_symlink(other_disk / "target", folder / "absolute");
  std::filesystem::create_symlink("absolute", folder / "relative");
  write_file(folder / "relative", "new");
  EXPECT_EQ(other_disk.read("target"), "new");
  EXPECT_EQ(std::filesystem::read_symlink(folder / "relative"), "absolute");
  EXPECT_EQ(std::filesystem::read_symlink(folder / "absolute"), other_disk / "target");
  EXPECT_THAT(folder.names(), ElementsAre("absolute", "relative"));
  EXPECT_THAT(other_disk.names(), ElementsAre("target"));

  std::filesystem::create_symlink(other_disk / "later", folder / "dangling");
  write_file(folder / "dangling", "x");
  EXPECT_EQ(other_disk.read("later"), "x");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "dangling"));

  std::filesystem::create_symlink("loop", folder / "loop");
  EXPECT_THAT(error_of([&] { write_file(folder / "loop", "x"); }), Fails(Error::file));
}

// Root would replace the pipe for everybody.
TEST(AtomicFile, TakesNoPipeAway) {
  const ScratchFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("pipe", folder / "link");
  for (const char* name : {"pipe", "link"})
    EXPECT_THAT(error_of([&] { write_file(folder / name, "x"); }), Fails(Error::file));
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
}

TEST(AtomicFile, TakesNamesAsLongAsTheSystemDoes) {
  const ScratchFolder folder;
  for (const size_t bytes : {241, 242, 254, 255}) {
    const std::string name(bytes, 'n');
    write_file(folder / name, "x");
    EXPECT_EQ(folder.read(name), "x");
  }
  std::string umlauts;
  while (umlauts.size() < 254) umlauts += "\xC3\xBC";
  AtomicFile file(folder / umlauts);
  const auto temporaries = temporaries_in(folder.path());
  ASSERT_EQ(temporaries.size(), 1u);
  const std::string temporary = temporaries[0].filename();
  EXPECT_EQ((temporary.size() - std::string("..XXXXXXXX.tmp").size()) % 2, 0u) << temporary;  // no half letter
  file.commit();
  EXPECT_THAT(error_of([&] { write_file(folder / std::string(256, 'n'), "x"); }), Fails(Error::file));
}

TEST(AtomicFile, RefusesAFolderInPlaceOfTheFile) {
  ScratchFolder folder;
  std::filesystem::create_directory(folder / "a.txt");
  EXPECT_THAT(error_of([&] { write_file(folder / "a.txt", "x"); }), Fails(Error::file));
  EXPECT_THAT(folder.names(), ElementsAre("a.txt"));
}

TEST(AtomicFile, RefusesAFileInPlaceOfTheFolder) {
  ScratchFolder folder;
  write_file(folder / "file", "x");
  EXPECT_THAT(error_of([&] { write_file(folder / "file" / "a.txt", "x"); }), Fails(Error::file));
}

// /proc refuses new files to everybody, and so tests the same for root, whom permissions do not stop.
TEST(AtomicFile, RefusesAnUnwritableFolder) {
  EXPECT_THAT(error_of([] { write_file("/proc/lockstep.txt", "x"); }), Fails(Error::file));
}

TEST(AtomicFile, RefusesAFolderWithoutWritePermission) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  ScratchFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  auto error = error_of([&] { write_file(folder / "a.txt", "x"); });
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
  EXPECT_THAT(error, Fails(Error::file));
}

// A limit on the size of files, in a process of its own, stands for the full disk: write() fails after some bytes. The
// signal that comes with it would end the process.
TEST(AtomicFile, KeepsTheOldFileWhenTheDiskIsFull) {
  ScratchFolder folder;
  write_file(folder / "a.txt", "before");
  pid_t child = fork();
  if (child == 0) {
    rlimit limit{1000, 1000};
    setrlimit(RLIMIT_FSIZE, &limit);
    auto error = error_of([&] { write_file(folder / "a.txt", std::string(5000, 'x')); });
    bool good = error.data && error.data->cause == Error::file;
    if (!good) std::cerr << error << '\n';
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(folder.read("a.txt"), "before");
  EXPECT_THAT(folder.names(), ElementsAre("a.txt"));
}

}  // namespace atomic_file_test
}  // namespace lockstep::io
